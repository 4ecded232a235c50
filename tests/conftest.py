"""Settings of the whole suite."""

from hypothesis import settings

# The first call of a compiled kernel takes as long as its compilation, so there is no deadline for single examples.
settings.register_profile("rankcert", deadline=None)
settings.load_profile("rankcert")
