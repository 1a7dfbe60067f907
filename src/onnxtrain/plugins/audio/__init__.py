"""Audio: mel spectrograms inside the model."""
