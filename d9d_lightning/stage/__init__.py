"""One stage, one microbatch: placeholders, the replay of the user's step, split backward."""
