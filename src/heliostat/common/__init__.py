"""What every package uses: errors, events, units, quoting for a shell."""
