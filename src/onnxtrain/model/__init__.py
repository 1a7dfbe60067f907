"""A user's file: its bytes read, checked, upgraded for training, and written back."""
