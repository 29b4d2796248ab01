"""Used by every package: errors, events, units, quoting for a shell."""
