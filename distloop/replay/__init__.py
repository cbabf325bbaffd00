"""Any step of a run, again, with its batch, values and gradients; two runs compared; read first: `replay`."""
