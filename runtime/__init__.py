"""What every role shares on one machine: child processes that never outlive their parent, and free ports."""
