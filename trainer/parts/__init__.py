"""The parts of a training step that can be recorded."""
