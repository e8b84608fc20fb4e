"""Looking into Hugging Face models: watch their heads, switch heads off, load the two models that install with pip."""

from headwise.extras import require

require("headwise.models", "headwise.models")
