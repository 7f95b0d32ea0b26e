"""Pictures of what encodings do: `posexport plot`."""
