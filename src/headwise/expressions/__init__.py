"""What is computed from scores, written down: recorded from functions, evaluated by any library, differentiated."""
