"""The copy of a model that training works on: its modes, types and forms; the file stays as it is."""
