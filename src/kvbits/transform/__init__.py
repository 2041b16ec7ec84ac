"""What is done to keys and values before a codec sees them: mean, balance, rotation, the rotary embedding taken off."""

from kvbits.transform.transform import NO_ROPE, NOTHING, UNROPED_KEYS, UNROPED_MEAN, Rope, Transform

__all__ = ["NOTHING", "NO_ROPE", "UNROPED_KEYS", "UNROPED_MEAN", "Rope", "Transform"]
