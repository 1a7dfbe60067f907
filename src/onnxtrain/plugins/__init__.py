"""Parts that training does without: texts, audio, pruning, structures, sparse models, privacy, tuning."""
