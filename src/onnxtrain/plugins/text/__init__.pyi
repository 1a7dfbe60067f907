from .chat_data import ChatData as ChatData
from .comparison_data import ComparisonData as ComparisonData
from .hugging_face import save_checkpoint as save_checkpoint
from .reinforcement import grpo as grpo
