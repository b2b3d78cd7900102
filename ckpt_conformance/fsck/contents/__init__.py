"""What a checkpoint holds, by name, whatever its layout: tensors read by tiles, and values."""
