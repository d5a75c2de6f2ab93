"""A run as separate jobs on the Hub: what is asked for, what it costs, how it is started, watched and ended."""
