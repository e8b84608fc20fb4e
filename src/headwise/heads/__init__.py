"""Reading heads: what kind each one is, and which of them carries a link between two words."""

from headwise.extras import require

require("headwise.heads", "headwise.heads")
