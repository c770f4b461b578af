"""What a run looks at while it trains: data, losses and state that one process would treat otherwise."""
