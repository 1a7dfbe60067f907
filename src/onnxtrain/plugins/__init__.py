"""Parts that training does without: texts, images, audio, tables, losses, pruning, sparse models, privacy, tuning."""
