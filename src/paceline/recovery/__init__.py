"""What keeps a run together when its group changes: regrouping, handover of the state, peer snapshots, departing state."""
