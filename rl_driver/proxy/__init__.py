"""The rollout proxy: one endpoint over dedicated and borrowed engines."""
