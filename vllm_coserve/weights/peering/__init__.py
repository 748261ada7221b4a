"""Workers hand versions of the weights on to each other: who reads from whom, and how."""
