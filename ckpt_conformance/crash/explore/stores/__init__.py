"""What is explored of a store of objects: saves whose mirror lies in one."""
