"""What all tests share."""

from hypothesis import settings

# A slow moment of the machine is no error of the code; speeds are benchmarks.
settings.register_profile("coserve", deadline=None)
settings.load_profile("coserve")
