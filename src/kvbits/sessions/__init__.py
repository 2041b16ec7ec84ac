"""Caches that outlive a call: saved to a file, found again by what they have read, or kept for a conversation."""
