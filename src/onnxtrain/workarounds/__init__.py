"""Other people's bugs: the book that lists them, and what is done about those that no rule or pass avoids by itself."""
