"""Callbacks that keep a log of a training: files, and the packages that people watch trainings with."""
