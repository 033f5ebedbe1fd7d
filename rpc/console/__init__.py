"""The console: a web page that shows what the API tells. Nothing of it is built, and nothing comes from elsewhere."""
