"""Programs: absl mains over the library."""
