"""Session v2: conversation trees, and the training rows they become."""
