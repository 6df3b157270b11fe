"""What keeps a user's model, thread and process as they were while it is traced, and what tells models apart."""
