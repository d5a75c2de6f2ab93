"""What a run left behind, read back: `report.json`, plots, comparisons and what to change next."""
