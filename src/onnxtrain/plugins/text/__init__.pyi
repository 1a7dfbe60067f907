from .chat_data import ChatData as ChatData
from .comparison_data import ComparisonData as ComparisonData
from .reinforcement import grpo as grpo
