"""What people read about results: tables, Markdown, JUnit XML, pictures and the report page."""
