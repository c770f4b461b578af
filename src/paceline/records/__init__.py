"""What a run writes down while it trains, for an audit or a re-run to read: ledger, receipt, hash chain."""
