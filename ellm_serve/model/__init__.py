"""What a checkpoint is: its dimensions, its tensors, and where its files come from."""
