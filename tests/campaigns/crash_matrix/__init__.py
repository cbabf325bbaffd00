"""The crash matrix: what a run goes on from after a fault in any file operation of a save, a prune or an export."""
