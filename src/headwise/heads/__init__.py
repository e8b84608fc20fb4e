"""Reading heads: what kind each one is, and which of them carries a link between two words."""
