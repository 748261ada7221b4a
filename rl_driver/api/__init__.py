"""Records and messages of the driver."""
