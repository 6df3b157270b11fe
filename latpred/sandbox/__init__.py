"""What keeps a user's model, thread and process as they were while the model is traced."""
