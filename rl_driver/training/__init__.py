"""The learner: losses, batches, optimiser steps, checkpoints."""
