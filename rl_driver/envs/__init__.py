"""Tasks that a policy is trained on; each is one file."""
