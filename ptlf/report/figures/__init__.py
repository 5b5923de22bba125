"""The pictures of a report: from runs to drawings."""
