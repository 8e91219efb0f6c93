"""What every experiment shares: recipes by name, the store of runs, tables, figures, arms and their colours, penalties."""
