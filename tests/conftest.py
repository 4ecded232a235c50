"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# The first call of a compiled kernel takes as long as its compilation, so there is no deadline for single examples;
# and a busy machine is no fault of a strategy.
settings.register_profile("rankcert", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rankcert")
