"""What outlives a server: keys with their budgets, what was spent, Jobs and harvests. A database, and a folder for large results.

SQLite in the folder by default; any PostgreSQL URL where several servers share the state. Needs the extra `serve`.
"""
