"""The parts of a training job: Ray actors, and the proxy that they share."""
