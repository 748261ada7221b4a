"""Where trajectories are kept."""
