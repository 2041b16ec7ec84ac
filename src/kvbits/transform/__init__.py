"""What is done to keys and values before a codec sees them: mean, balance, rotation, the rotary embedding taken off."""

from kvbits.transform.transform import NO_TURN, NOTHING, TURNED_KEYS, TURNED_MEAN, Rope, Transform

__all__ = ["NOTHING", "NO_TURN", "TURNED_KEYS", "TURNED_MEAN", "Rope", "Transform"]
