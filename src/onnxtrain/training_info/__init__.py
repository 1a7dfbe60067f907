"""The standard's ``TrainingInfoProto``: read, check, build, write."""
