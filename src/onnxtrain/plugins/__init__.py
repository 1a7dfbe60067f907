"""Parts that training does without: texts, audio, pruning, structures, sparse models, differential privacy."""
