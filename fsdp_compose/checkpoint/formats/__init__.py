"""Files of whole tensors: what a format is, the one that is given, and how files are committed."""
