"""Looking into Hugging Face models: watch their heads, switch heads off, load the two models that install with pip."""
